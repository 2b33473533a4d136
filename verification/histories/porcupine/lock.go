package main

import (
	"fmt"
	"math"
	"slices"
	"sort"
	"strings"

	"github.com/anishathalye/porcupine"
)

// lock is a state of a fenced, re-entrant lock. Several owners may hold it at once, and the server may end their holds.
//
// A state is immutable: each operation returns new states.
type lock struct {
	// The smallest limit that a holder named since the lock was last free.
	limit int
	// The greatest token so far.
	newest int64
	// Sorted by owner.
	holders []hold
	// The current time is no earlier than this.
	clock int64
}

type hold struct {
	owner string
	holds int
	// 0: no client has received it.
	token int64
	// The lease ends no earlier than this.
	lasts int64
	// How many of its holds the server will revoke, because too few replicas confirm them.
	unconfirmed int
}

func (l lock) find(owner string) int {
	return slices.IndexFunc(l.holders, func(it hold) bool { return it.owner == owner })
}

// with replaces the owner's hold by this one, or removes it if its hold count is 0.
func (l lock) with(it hold) lock {
	l = l.without(it.owner)
	if it.holds > 0 {
		l.holders = append(l.holders, it)
		sort.Slice(l.holders, func(a, b int) bool { return l.holders[a].owner < l.holders[b].owner })
	}
	return l
}

func (l lock) without(owner string) lock {
	l.holders = slices.DeleteFunc(slices.Clone(l.holders), func(it hold) bool { return it.owner == owner })
	return l
}

// input is a request, as the model needs it.
type input struct {
	*operation
	// Null is a valid reply in any state of the lock, because other requests may have waited ahead of it.
	mayBeRefused bool
	// The step in which the server revokes the grant of this acquisition, because replicas did not confirm it.
	revokes bool
	// When an owner's hold may have ended without a reply, for example because its connection closed.
	ends map[string][]span
}

type span struct{ from, to int64 }

// states are the possible states after a step.
type states []lock

// lapsed returns all possible states before a step: leases may have ended, and holds may have been lost, without a
// reply.
func (l lock) lapsed(in input) states {
	since := l.clock
	l.clock = max(l.clock, in.From)
	all := states{l}
	for _, it := range l.holders {
		at := it.lasts
		for _, end := range in.ends[it.owner] {
			if max(since, end.from) <= end.to {
				at = min(at, end.from)
			}
		}
		if at == math.MaxInt64 || at > in.latest() {
			continue
		}
		for _, before := range slices.Clone(all) {
			before.clock = max(before.clock, at)
			all = append(all, before.without(it.owner))
		}
	}
	return all
}

// step returns the possible states after a request. There is none if the reply is wrong.
func (l lock) step(in input) states {
	var after states
	for _, before := range l.lapsed(in) {
		if in.Outcome.word == "unknown" {
			// The request may not have taken effect.
			after = append(after, before)
		}
		if next, ok := before.happens(in); ok && next.clock <= in.latest() {
			after = append(after, next)
		}
	}
	return after
}

func (l lock) happens(in input) (lock, bool) {
	at := l.find(in.Owner)
	var held hold
	if at >= 0 {
		held = l.holders[at]
	}
	isNull := in.Outcome.word == "null"
	switch in.What {
	case "acquire":
		return l.acquire(in, held)
	case "release":
		if at < 0 || (in.Token != nil && held.token != 0 && *in.Token != held.token) {
			// `ALL` without a token gets the same reply if it only withdrew a request.
			withdrew := in.Token == nil && in.Holds != nil && *in.Holds == 0 && in.Outcome.Left != nil && *in.Outcome.Left == 0
			return l, isNull || withdrew
		}
		if in.Holds != nil {
			held.holds = min(*in.Holds, held.holds)
		} else {
			held.holds--
		}
		if in.Lease != nil {
			held.lasts = in.until()
		}
		left := min(held.holds, 1)
		// No client received the hold's token, so it may differ from that of the request.
		unclear := isNull && in.Token != nil && l.holders[at].token == 0
		if unclear {
			return l, true
		}
		return l.with(held), in.Outcome.word == "unknown" || (in.Outcome.Left != nil && *in.Outcome.Left == left)
	case "renew":
		if at < 0 || (in.Token != nil && held.token != 0 && *in.Token != held.token) {
			return l, isNull
		}
		if isNull {
			return l, in.Token != nil && held.token == 0
		}
		held.lasts = in.until()
		if in.Fence != nil && held.token != 0 {
			held.token = max(held.token, *in.Fence)
		}
		if token := in.Outcome.Token; token != nil {
			if held.token != 0 && held.token != *token {
				return l, false
			}
			held.token = *token
			l.newest = max(l.newest, *token)
		}
		return l.with(held), !isNull
	case "check":
		return l, (at >= 0) == (in.Outcome.word == "done")
	case "force":
		count := len(l.holders)
		l.holders = nil
		return l, in.Outcome.Count == nil || *in.Outcome.Count == count
	case "expire":
		if at < 0 || (in.Token != nil && held.token != 0 && *in.Token != held.token) {
			return l, isNull
		}
		if held.lasts != math.MaxInt64 {
			l.clock = max(l.clock, held.lasts)
		}
		return l.without(in.Owner), !isNull
	case "end":
		return l.without(in.Owner), true
	}
	panic("no operation is called " + in.What)
}

func (l lock) acquire(in input, held hold) (lock, bool) {
	isHeld := held.holds > 0
	if in.revokes {
		if held.unconfirmed == 0 {
			return l, false
		}
		held.holds, held.unconfirmed = max(0, held.holds-held.unconfirmed), 0
		return l.with(held), true
	}
	var admitted bool
	if isHeld {
		repeats := in.Holds != nil && held.holds >= *in.Holds && l.limit <= in.most()
		admitted = !in.New && (in.most() == l.limit || repeats)
	} else {
		admitted = len(l.holders) == 0 || len(l.holders) < min(l.limit, in.most())
	}
	if in.Outcome.word == "null" {
		return l, in.mayBeRefused || !admitted
	}
	if !admitted {
		return l, false
	}
	added := 1
	if isHeld {
		if in.Holds != nil {
			added = max(0, *in.Holds-held.holds)
		}
		held.holds += added
		held.lasts = max(held.lasts, in.until())
	} else {
		if in.Holds != nil {
			added = *in.Holds
		}
		if len(l.holders) == 0 {
			l.limit = in.most()
		}
		l.limit = min(l.limit, in.most())
		held = hold{owner: in.Owner, holds: added, lasts: in.until()}
	}
	if in.Outcome.word == "unconfirmed" {
		held.unconfirmed = max(1, added)
	}
	if token := in.Outcome.Token; token != nil {
		if held.token != 0 && held.token != *token || !isHeld && *token <= l.newest {
			return l, false
		}
		held.token = *token
		l.newest = max(l.newest, *token)
	}
	return l.with(held), true
}

// known is a set of possible states. Equal sets have the same text.
type known struct {
	states states
	text   string
}

func remember(all states) known {
	// Of states that differ only in the time, the earliest allows everything that the others allow.
	earliest := map[string]lock{}
	for _, it := range all {
		text := it.text()
		if other, found := earliest[text]; !found || it.clock < other.clock {
			earliest[text] = it
		}
	}
	var it known
	texts := make([]string, 0, len(earliest))
	for text := range earliest {
		texts = append(texts, text)
	}
	sort.Strings(texts)
	for _, text := range texts {
		it.states = append(it.states, earliest[text])
		it.text += fmt.Sprintf("%s at %d\n", text, earliest[text].clock)
	}
	return it
}

func (l lock) text() string {
	var text strings.Builder
	limit := l.limit
	if len(l.holders) == 0 {
		limit = 0
	}
	fmt.Fprintf(&text, "%d %d", limit, l.newest)
	for _, it := range l.holders {
		fmt.Fprintf(&text, " %q*%d+%d:%d<%d", it.owner, it.holds, it.unconfirmed, it.token, it.lasts)
	}
	return text.String()
}

var lockModel = porcupine.Model{
	Init: func() any { return remember(states{{}}) },
	Step: func(before, in, _ any) (bool, any) {
		var after states
		for _, it := range before.(known).states {
			after = append(after, it.step(in.(input))...)
		}
		return len(after) > 0, remember(after)
	},
	Equal: func(one, other any) bool { return one.(known).text == other.(known).text },
}
