package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"strings"
)

// operation is one operation of a history, as ../README.md specifies it.
type operation struct {
	Process string  `json:"process"`
	Key     string  `json:"key"`
	What    string  `json:"what"`
	Owner   string  `json:"owner"`
	Limit   *int    `json:"limit"`
	Lease   *int64  `json:"lease"`
	Holds   *int    `json:"holds"`
	New     bool    `json:"new"`
	Wait    bool    `json:"wait"`
	Queued  *int64  `json:"queued"`
	Several bool    `json:"several"`
	Token   *int64  `json:"token"`
	Fence   *int64  `json:"fence"`
	From    int64   `json:"from"`
	To      *int64  `json:"to"`
	Outcome outcome `json:"outcome"`
	line    string
}

// outcome is what the client received: one of the numbers, or a word.
type outcome struct {
	Token *int64 `json:"token"`
	Left  *int   `json:"left"`
	Count *int   `json:"count"`
	word  string
}

func (o *outcome) UnmarshalJSON(text []byte) error {
	if text[0] == '"' {
		return json.Unmarshal(text, &o.word)
	}
	type numbers outcome
	return json.Unmarshal(text, (*numbers)(o))
}

// latest returns the latest time at which the operation can have taken effect.
func (o *operation) latest() int64 {
	if o.To == nil {
		return math.MaxInt64
	}
	return *o.To
}

// until returns the earliest time at which a lease that this request started may be over.
func (o *operation) until() int64 {
	if o.Lease == nil {
		return math.MaxInt64
	}
	return o.From + *o.Lease
}

// most returns the limit of this request: how many owners may hold the lock at once.
func (o *operation) most() int {
	switch {
	case o.Limit == nil:
		return 1
	case *o.Limit == 0:
		return math.MaxInt
	}
	return *o.Limit
}

func readFile(name string) ([]*operation, error) {
	file, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	return read(file)
}

func read(from io.Reader) ([]*operation, error) {
	var history []*operation
	lines := bufio.NewScanner(from)
	lines.Buffer(nil, 1<<20)
	for number := 1; lines.Scan(); number++ {
		line := lines.Text()
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		it := &operation{line: line}
		decoder := json.NewDecoder(strings.NewReader(line))
		decoder.DisallowUnknownFields()
		if err := decoder.Decode(it); err != nil {
			return nil, fmt.Errorf("line %d: %w: %s", number, err, line)
		}
		history = append(history, it)
	}
	return history, lines.Err()
}
