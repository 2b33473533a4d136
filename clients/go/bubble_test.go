//go:build go1.25

package holdfast

import (
	"testing"
	"testing/synctest"
)

// bubble runs a test whose time passes only while all its goroutines are blocked: times are exact, however slow the
// machine is, and no goroutine outlives the test.
func bubble(t *testing.T, test func(t *testing.T)) {
	t.Helper()
	t.Parallel()
	synctest.Test(t, test)
}
