package holdfast

import (
	"errors"
	"fmt"
	"os"
	"strings"
)

// Errors that callers test with [errors.Is].
var (
	// ErrNotAcquired means that the lock was not granted: another owner holds it, or the time to wait is over.
	ErrNotAcquired = errors.New("holdfast: lock not acquired")
	// ErrLockLost matches every [LostError].
	ErrLockLost = errors.New("holdfast: lock lost")
	// ErrDeadlock means that the server refused the wait: it would have closed a cycle of owners that wait for each other.
	ErrDeadlock = errors.New("holdfast: deadlock")
	// ErrModuleNotLoaded means that the server does not know the LOCK commands.
	ErrModuleNotLoaded = errors.New("holdfast: the Holdfast module is not loaded: start the server with --loadmodule libholdfast.so, or run MODULE LOAD")
	// ErrServerTooOld means that the server's module speaks only older versions of the protocol.
	ErrServerTooOld = errors.New("holdfast: the server's module is too old for this client")
	// ErrClientTooOld means that the server's module speaks only newer versions of the protocol.
	ErrClientTooOld = errors.New("holdfast: this client is too old for the server's module")
	// ErrClosed means that the client was closed.
	ErrClosed = errors.New("holdfast: client is closed")
)

var (
	errSilent = fmt.Errorf("holdfast: no reply: %w", os.ErrDeadlineExceeded)
	// These two don't count as failures of the server.
	errNoConnection = errors.New("holdfast: no free connection")
	errNoReply      = errors.New("holdfast: no reply within the caller's time")
)

// Reason is why a lock was lost.
type Reason string

// The reasons of a [LostError].
const (
	// ReasonExpired: no renewal was confirmed before the lease may have ended.
	ReasonExpired Reason = "expired"
	// ReasonGone: the server no longer holds the lock for this owner: it was force-released, deleted, or its lease ended.
	ReasonGone Reason = "gone"
	// ReasonChanged: the key holds a value that is not a lock.
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

// Is makes an error reply DEADLOCK match [ErrDeadlock].
func (e ServerError) Is(target error) bool { return target == ErrDeadlock && e.Code() == "DEADLOCK" }

// failure returns the error that a reply is, or nil.
func failure(reply any) error {
	e, failed := reply.(ServerError)
	switch {
	case !failed:
		return nil
	case strings.HasPrefix(string(e), "ERR unknown command") && strings.Contains(string(e), "LOCK."):
		return fmt.Errorf("%w: %w", ErrModuleNotLoaded, e)
	}
	return e
}

// A verdict says whether and how a failed request may be repeated. From passing on, it may.
type verdict int

const (
	fatal       verdict = iota
	overwritten         // the key holds a value that is not a lock
	passing             // after the pause
	broken              // after the pause, over another connection
	demoted             // after the pause, to another node: this one is no longer the primary
	atOnce              // without a pause; the second time in a row, after it
)

// verdicts are those of error replies by their codes; other codes are fatal.
var verdicts = map[string]verdict{
	"LOADING": passing, "BUSY": passing, "TRYAGAIN": passing, "MASTERDOWN": passing, "MISCONF": passing, "NOREPLICAS": passing,
	"CLUSTERDOWN": passing, "OOM": passing, "UNCONFIRMED": passing,
	"READONLY": demoted, "UNBLOCKED": demoted,
	"MOVED": atOnce, "ASK": atOnce, "SUPERSEDED": atOnce,
	"WRONGTYPE": overwritten,
}

// passingTexts are parts of replies with the code ERR that pass.
var passingTexts = []string{"too many waiters", "being confirmed", "max number of clients reached"}

func verdictOf(err error) verdict {
	var reply ServerError
	switch {
	case errors.As(err, &reply):
		for _, text := range passingTexts {
			if reply.Code() == "ERR" && strings.Contains(string(reply), text) {
				return passing
			}
		}
		return verdicts[reply.Code()]
	case errors.Is(err, errNoConnection), errors.Is(err, errNoReply):
		return passing
	case errors.Is(err, ErrModuleNotLoaded), errors.Is(err, ErrServerTooOld), errors.Is(err, ErrClientTooOld), errors.Is(err, ErrClosed):
		return fatal
	}
	return broken
}
