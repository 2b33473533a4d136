package dapr

import (
	"testing"

	conformance "github.com/dapr/components-contrib/tests/conformance/lock"

	"holdfast/internal/testserver"
)

func TestConformance(t *testing.T) {
	s := testserver.Start(t)
	store := New(nil)
	t.Cleanup(func() { _ = store.Close() })
	config, err := conformance.NewTestConfig("holdfast", nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	conformance.ConformanceTests(t, map[string]string{"redisHost": s.Addr}, store, config)
}
