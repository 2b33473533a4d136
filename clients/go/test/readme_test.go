package test

import (
	"context"
	"os"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"

	"holdfast/goredis"
	"holdfast/internal/testserver"
)

func projectReadme(ctx context.Context, rdb *redis.Client, printLetter func(context.Context, int64) error) error {
	client, err := goredis.New(rdb)
	if err != nil {
		return err
	}
	defer client.Close()
	hold, err := client.Lock(ctx, "printer")
	if err != nil {
		return err
	}
	defer hold.Release(ctx)
	return printLetter(hold.Context(), hold.Fence())
}

func clientReadme(ctx context.Context, rdb *redis.Client, write func(context.Context, int64) error) error {
	client, err := goredis.New(rdb) // a *redis.Client; or rueidis.New(client, option)
	if err != nil {
		return err
	}
	defer client.Close()
	hold, err := client.Lock(ctx, "report") // waits; TryLock does not
	if err != nil {
		return err // errors.Is(err, holdfast.ErrNotAcquired): ctx ended first
	}
	defer hold.Release(ctx) // also if ctx has ended
	return write(hold.Context(), hold.Fence())
}

func TestReadmeExamplesRun(t *testing.T) {
	rdb := redis.NewClient(&redis.Options{Addr: testserver.Start(t).Addr})
	defer rdb.Close()
	for _, example := range []func(context.Context, *redis.Client, func(context.Context, int64) error) error{projectReadme, clientReadme} {
		var fence int64
		work := func(_ context.Context, token int64) error { fence = token; return nil }
		if err := example(ctx, rdb, work); err != nil || fence == 0 {
			t.Fatal(fence, err)
		}
	}
}

// The examples above are those of the documents.
func TestEveryReadmeExampleIsRun(t *testing.T) {
	here := must[[]byte](t)(os.ReadFile("readme_test.go"))
	for _, file := range []string{"../../../README.md", "../README.md"} {
		_, rest, found := strings.Cut(string(must[[]byte](t)(os.ReadFile(file))), "```go\n")
		example, _, _ := strings.Cut(rest, "```")
		indented := "\t" + strings.ReplaceAll(strings.TrimSpace(example), "\n", "\n\t")
		if !found || !strings.Contains(string(here), "{\n"+indented+"\n}") || strings.Contains(rest, "```go\n") {
			t.Errorf("%s has another example than the one that runs here:\n%s", file, example)
		}
	}
}
