package valkeyrie

import (
	"testing"

	"github.com/kvtools/valkeyrie/testsuite"

	"holdfast"
	"holdfast/internal/testserver"
)

func newStore(t *testing.T, s *testserver.Server) *Store {
	t.Helper()
	c, err := holdfast.New(holdfast.Config{Addr: s.Addr})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return New(c)
}

func TestLock(t *testing.T) { testsuite.RunTestLock(t, newStore(t, testserver.Start(t))) }

func TestLockTTL(t *testing.T) {
	s := testserver.Start(t)
	testsuite.RunTestLockTTL(t, newStore(t, s), newStore(t, s))
}
