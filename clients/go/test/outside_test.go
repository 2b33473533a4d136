package test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// run runs a command outside the workspace, without a module proxy.
func run(t *testing.T, dir, name string, args ...string) {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GOWORK=off", "GOFLAGS=-mod=mod", "GOPROXY=off")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
}

const program = `package main

import (
	"log"

	"github.com/redis/go-redis/v9"

	"PATH"
	"PATH/goredis"
)

func main() {
	var client *holdfast.Client
	client, err := goredis.New(redis.NewClient(&redis.Options{}))
	log.Print(client, err)
}
`

// A program outside the repository uses the client by replace: under the present path of the modules, and under one that
// set-module-path gives them.
func TestProgramOutsideTheRepositoryUsesTheClientByReplace(t *testing.T) {
	here := must[string](t)(filepath.Abs(".."))
	// These tests have this version in their go.mod, so that it is in the module cache.
	listed := must[[]byte](t)(exec.Command("go", "list", "-m", "-f", "{{.Version}}", "github.com/redis/go-redis/v9").Output())
	version := strings.TrimSpace(string(listed))
	root := filepath.Join(here, "..", "..")
	// Always the same path, which go's cache has in its keys: what has not changed is not compiled again.
	dir := filepath.Join(root, ".run", "go-outside")
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	clone := filepath.Join(dir, "clone")
	renamed, driver := filepath.Join(clone, "clients", "go"), filepath.Join("verification", "conformance", "drivers", "go")
	for _, dir := range []string{filepath.Join("clients", "go"), driver, filepath.Join("bench", "league", "go")} {
		if err := os.CopyFS(filepath.Join(clone, dir), os.DirFS(filepath.Join(root, dir))); err != nil {
			t.Fatal(err)
		}
	}
	run(t, renamed, "./set-module-path", "renamed/holdfast", "v1.2.3")
	for path, want := range map[string]string{
		"goredis/go.mod":                 "renamed/holdfast v1.2.3",
		"README.md":                      "-require renamed/holdfast/goredis@v1.2.3 -replace renamed/holdfast/goredis=/",
		"bench/bench_test.go":            `{"holdfast", func`, // no import
		"../../bench/league/go/redis.go": `"renamed/holdfast/goredis"`,
	} {
		if text := must[[]byte](t)(os.ReadFile(filepath.Join(renamed, path))); !strings.Contains(string(text), want) {
			t.Errorf("%s does not contain %s", path, want)
		}
	}
	// Compiles, but does not link.
	compile := []string{"list", "-export", "."}
	run(t, filepath.Join(clone, driver), "go", compile...)
	for path, source := range map[string]string{"holdfast": here, "renamed/holdfast": renamed} {
		dir := filepath.Join(dir, path)
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		sum := must[[]byte](t)(os.ReadFile("go.sum"))
		for name, text := range map[string]string{
			"main.go": strings.ReplaceAll(program, "PATH", path),
			"go.sum":  string(sum),
			"go.mod": "module outside\n\ngo 1.24\n\nrequire (\n\t" + path + " v0.0.0\n\t" + path + "/goredis v0.0.0\n\tgithub.com/redis/go-redis/v9 " + version + "\n)\n\nreplace (\n\t" +
				path + " => " + source + "\n\t" + path + "/goredis => " + filepath.Join(source, "goredis") + "\n)\n",
		} {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		run(t, dir, "go", compile...)
	}
}
