package vault

import (
	"testing"

	"github.com/hashicorp/vault/sdk/physical"

	"holdfast"
	"holdfast/internal/testserver"
)

func TestExerciseHABackend(t *testing.T) {
	s := testserver.Start(t)
	backends := make([]*Backend, 2)
	for i := range backends {
		c, err := holdfast.New(holdfast.Config{Addr: s.Addr})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		backends[i] = New(c, 0)
	}
	physical.ExerciseHABackend(t, backends[0], backends[1])
}
