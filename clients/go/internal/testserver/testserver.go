// Package testserver starts Redis servers with the Holdfast module for tests.
package testserver

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

const patience = time.Minute

// ready matches what a server or a Sentinel logs once it accepts connections.
var ready = regexp.MustCompile(`eady to accept connections|Sentinel ID is`)

// A Server is a server process that ends with the test.
type Server struct {
	Addr string // host:port, or the path of a unix socket
	Dir  string
	cmd  *exec.Cmd
}

// Start starts a server with the module that HOLDFAST_MODULE names. It listens on a unix socket unless args name a port.
// The program is HOLDFAST_SERVER, by default redis-server.
func Start(t testing.TB, args ...string) *Server {
	t.Helper()
	module := os.Getenv("HOLDFAST_MODULE")
	if module == "" {
		t.Skip("HOLDFAST_MODULE does not name the module: run clients/go/run-tests")
	}
	return StartPlain(t, append([]string{"--loadmodule", module}, args...)...)
}

// StartPlain starts a server without the module, or a Sentinel if the first of args is its configuration file.
func StartPlain(t testing.TB, args ...string) *Server {
	t.Helper()
	dir, err := os.MkdirTemp("", "hf") // t.TempDir is too long for a unix socket
	if err != nil {
		t.Fatal(err)
	}
	s := &Server{Dir: dir, Addr: filepath.Join(dir, "s")}
	t.Cleanup(func() {
		s.Kill()
		if log, _ := os.ReadFile(filepath.Join(dir, "log")); strings.Contains(string(log), "holdfast: internal error") {
			t.Errorf("the module reports an internal error:\n%s", log)
		}
		_ = os.RemoveAll(dir)
	})
	port := 0
	for i, arg := range args {
		if (arg == "--port" || arg == "--tls-port") && args[i+1] != "0" {
			port = i + 1
		}
	}
	args = append(slices.Clone(args), "--dir", dir, "--save", "", "--bind", "127.0.0.1")
	if port == 0 {
		args = append(args, "--port", "0", "--unixsocket", s.Addr)
	}
	for {
		if port > 0 {
			s.Addr = "127.0.0.1:" + args[port]
		}
		if s.run(t, args) {
			return s
		}
		args[port] = Port(t)
	}
}

// run starts the process and waits until it accepts connections. It returns false if another process uses the port.
func (s *Server) run(t testing.TB, args []string) bool {
	t.Helper()
	program := os.Getenv("HOLDFAST_SERVER")
	if program == "" {
		program = "redis-server"
	}
	path := filepath.Join(s.Dir, "log")
	log, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = log.Close() }()
	s.cmd = exec.Command(program, args...)
	s.cmd.Stdout, s.cmd.Stderr = log, log
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var text []byte
	for deadline := time.Now().Add(patience); !ready.Match(text); time.Sleep(5 * time.Millisecond) {
		text, _ = os.ReadFile(path)
		if strings.Contains(string(text), "Failed finding TLS support") {
			t.Skip("this server was built without TLS")
		}
		if strings.Contains(string(text), "Address already in use") {
			s.Kill()
			return false
		}
		if time.Now().After(deadline) {
			t.Fatalf("the server did not start:\n%s", text)
		}
	}
	return true
}

// Kill ends the process with SIGKILL.
func (s *Server) Kill() {
	if s.cmd != nil && s.cmd.Process != nil {
		_ = s.cmd.Process.Kill()
		_ = s.cmd.Wait()
		s.cmd = nil
	}
}

// Pause stops the process for a time, as a long command or a busy machine may.
func (s *Server) Pause(d time.Duration) {
	_ = s.cmd.Process.Signal(syscall.SIGSTOP)
	time.Sleep(d)
	_ = s.cmd.Process.Signal(syscall.SIGCONT)
}

// Port returns a port that was free a moment ago, low enough for a cluster's bus. If another process takes it before
// Start does, Start takes another one.
func Port(t testing.TB) string {
	t.Helper()
	for {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		port := l.Addr().(*net.TCPAddr).Port
		_ = l.Close()
		if port < 55000 {
			return strconv.Itoa(port)
		}
	}
}

// Eventually waits for a condition.
func Eventually(t testing.TB, what string, condition func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !condition(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}
