// Package testserver starts Redis servers with the Holdfast module for tests.
package testserver

import (
	"bufio"
	"fmt"
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

// A Server is a process of its own that ends with the test.
type Server struct {
	Addr string // host:port, or the path of a unix socket
	Dir  string
	args []string
	cmd  *exec.Cmd
	t    testing.TB
}

// Module returns the path of the module under test, or skips the test if HOLDFAST_MODULE does not name it.
func Module(t testing.TB) string {
	t.Helper()
	path := os.Getenv("HOLDFAST_MODULE")
	if path == "" {
		t.Skip("HOLDFAST_MODULE does not name the module: run scripts/test-go")
	}
	return path
}

// Start starts a server with the module that listens on a unix socket, unless args name a port. The program is
// HOLDFAST_SERVER, redis-server by default.
func Start(t testing.TB, args ...string) *Server {
	t.Helper()
	return StartPlain(t, append([]string{"--loadmodule", Module(t)}, args...)...)
}

// StartPlain starts a server without the module.
func StartPlain(t testing.TB, args ...string) *Server {
	t.Helper()
	dir, err := os.MkdirTemp("", "hf") // t.TempDir is too long for a unix socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	s := &Server{Dir: dir, t: t, Addr: filepath.Join(dir, "s")}
	s.args = append([]string{"--dir", dir, "--save", ""}, args...)
	for i, arg := range args {
		if (arg == "--port" || arg == "--tls-port") && args[i+1] != "0" {
			s.Addr = "127.0.0.1:" + args[i+1]
		}
	}
	if strings.HasPrefix(s.Addr, "/") {
		s.args = append(s.args, "--port", "0", "--unixsocket", s.Addr)
	} else {
		s.args = append(s.args, "--bind", "127.0.0.1")
	}
	t.Cleanup(s.Kill)
	for !s.run() {
		s.takeAnotherPort()
	}
	return s
}

// What a server, or a Sentinel, says once it accepts connections.
var ready = regexp.MustCompile(`eady to accept connections|Sentinel ID is`)

// Run starts the process again after Kill, and waits until it answers.
func (s *Server) Run() {
	s.t.Helper()
	Eventually(s.t, "the port is free again", s.run)
}

// takeAnotherPort replaces a port that another process has bound since Port returned it.
func (s *Server) takeAnotherPort() {
	for i, arg := range s.args {
		if (arg == "--port" || arg == "--tls-port") && s.args[i+1] != "0" {
			s.args[i+1] = Port(s.t)
			s.Addr = "127.0.0.1:" + s.args[i+1]
		}
	}
}

// run starts the process, and reports whether it answers; if not, another process has its port.
func (s *Server) run() bool {
	s.t.Helper()
	program := os.Getenv("HOLDFAST_SERVER")
	if program == "" {
		program = "redis-server"
	}
	log, err := os.Create(filepath.Join(s.Dir, "log"))
	if err != nil {
		s.t.Fatal(err)
	}
	defer func() { _ = log.Close() }()
	args := s.args
	for i, arg := range args { // a Sentinel reads its configuration file first
		if strings.HasSuffix(arg, ".conf") {
			args = append([]string{arg, "--sentinel"}, slices.Delete(slices.Clone(args), i, i+1)...)
		}
	}
	s.cmd = exec.Command(program, args...)
	s.cmd.Stdout, s.cmd.Stderr = log, log
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := s.cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	// The server that answers on the port may be another process's: this one's log says that it listens.
	text, listens := []byte{}, false
	for deadline := time.Now().Add(patience); !listens || !s.answers(); time.Sleep(5 * time.Millisecond) {
		text, _ = os.ReadFile(log.Name())
		listens = ready.Match(text)
		if strings.Contains(string(text), "Failed finding TLS support") {
			s.t.Skip("this server was built without TLS")
		}
		if strings.Contains(string(text), "Address already in use") {
			s.Kill()
			return false
		}
		if time.Now().After(deadline) {
			s.t.Fatalf("the server does not answer:\n%s", text)
		}
	}
	return true
}

// answers reports whether the server accepts connections. With TLS it needs no more.
func (s *Server) answers() bool {
	network := "tcp"
	if strings.HasPrefix(s.Addr, "/") {
		network = "unix"
	}
	c, err := net.DialTimeout(network, s.Addr, time.Second)
	if err != nil {
		return false
	}
	defer func() { _ = c.Close() }()
	for i, arg := range s.args {
		if arg == "--tls-port" && s.args[i+1] != "0" {
			return true
		}
	}
	_ = c.SetDeadline(time.Now().Add(time.Second))
	if _, err := fmt.Fprint(c, "PING\r\n"); err != nil {
		return false
	}
	line, err := bufio.NewReader(c).ReadString('\n')
	return err == nil && !strings.HasPrefix(line, "-LOADING")
}

// Kill ends the process without a word.
func (s *Server) Kill() {
	if s.cmd != nil && s.cmd.Process != nil {
		_ = s.cmd.Process.Signal(syscall.SIGKILL)
		_ = s.cmd.Wait()
		s.cmd = nil
	}
}

// Pause stops the process for a time, as a long command or a busy machine does.
func (s *Server) Pause(d time.Duration) {
	_ = s.cmd.Process.Signal(syscall.SIGSTOP)
	time.Sleep(d)
	_ = s.cmd.Process.Signal(syscall.SIGCONT)
}

// Port returns a port that was free a moment ago (Start takes another if it is not any more), low enough for a cluster's bus.
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
