package holdfast

import (
	"errors"
	"strings"
)

// Errors that callers test with [errors.Is].
var (
	// ErrNotAcquired means that the lock was not granted: another owner holds it, or the time to wait is over.
	ErrNotAcquired = errors.New("holdfast: lock not acquired")
	// ErrLockLost matches every [LostError].
	ErrLockLost = errors.New("holdfast: lock lost")
	// ErrDeadlock means that the wait would have closed a cycle of owners that wait for each other.
	ErrDeadlock = errors.New("holdfast: deadlock")
	// ErrModuleNotLoaded means that the server does not know the LOCK commands.
	ErrModuleNotLoaded = errors.New("holdfast: the Holdfast module is not loaded: start the server with --loadmodule libholdfast.so, or run MODULE LOAD")
	// ErrServerTooOld means that the server's module speaks only older protocols.
	ErrServerTooOld = errors.New("holdfast: the server's module is too old for this client")
	// ErrClientTooOld means that the server's module speaks only newer protocols.
	ErrClientTooOld = errors.New("holdfast: this client is too old for the server's module")
	// ErrClosed means that the client was closed.
	ErrClosed = errors.New("holdfast: client is closed")
)

// Reason says why a lock was lost.
type Reason string

// The reasons of a [LostError].
const (
	// ReasonExpired: the server did not confirm the lock before the lease may have ended.
	ReasonExpired Reason = "expired"
	// ReasonGone: the server no longer holds the lock for this owner: it was force-released, deleted, or its lease ended.
	ReasonGone Reason = "gone"
	// ReasonChanged: another type of value is stored under the lock's key.
	ReasonChanged Reason = "changed"
	// ReasonDisconnected: the connection of an ephemeral lock broke.
	ReasonDisconnected Reason = "disconnected"
)

// A LostError reports that a lock was lost before it was released. It is the [context.Cause] of [Hold.Context].
type LostError struct {
	Name   string // the lock's name; several names are joined by commas
	Reason Reason
}

func (e *LostError) Error() string {
	return "holdfast: lock " + e.Name + " lost: " + string(e.Reason)
}

// Is makes every LostError match [ErrLockLost].
func (e *LostError) Is(target error) bool { return target == ErrLockLost }

// A ServerError is an error reply of the server, such as "NOPERM this user has no permissions …".
type ServerError string

func (e ServerError) Error() string { return string(e) }

// Code returns the first word, such as "NOPERM".
func (e ServerError) Code() string {
	code, _, _ := strings.Cut(string(e), " ")
	return code
}

// Is makes error replies match the errors of this package that they stand for.
func (e ServerError) Is(target error) bool {
	return target == ErrDeadlock && e.Code() == "DEADLOCK" || target == ErrModuleNotLoaded && e.unknownCommand()
}

func (e ServerError) unknownCommand() bool {
	return strings.HasPrefix(string(e), "ERR unknown command")
}

// passing reports whether the same request may succeed later. The codes that say where it may succeed are the route's.
func (e ServerError) passing() bool {
	switch e.Code() {
	case "ERR":
		return strings.Contains(string(e), "too many waiters") || strings.Contains(string(e), "being confirmed") ||
			strings.Contains(string(e), "max number of clients reached")
	case "LOADING", "BUSY", "TRYAGAIN", "MASTERDOWN", "MISCONF", "NOREPLICAS", "CLUSTERDOWN", "OOM", "UNCONFIRMED":
		return true
	}
	return false
}
