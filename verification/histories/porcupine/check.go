package main

import (
	"cmp"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/anishathalye/porcupine"
)

// check checks each lock of a history, and the tokens of all locks. It returns the violations, and what each search
// could not decide within this time.
func check(history []*operation, within time.Duration) (wrong, undecided []string) {
	locks := map[string][]*operation{}
	for _, it := range history {
		locks[it.Key] = append(locks[it.Key], it)
	}
	judge := func(name string, model porcupine.Model, operations []porcupine.Operation) {
		switch result, info := porcupine.CheckOperationsVerbose(model, operations, within); result {
		case porcupine.Illegal:
			wrong = append(wrong, name+": no order explains "+firstLeftOut(operations, info))
		case porcupine.Unknown:
			undecided = append(undecided, name)
		}
	}
	keys := make([]string, 0, len(locks))
	for key := range locks {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	for _, key := range keys {
		judge("lock "+key, lockModel, steps(locks[key]))
	}
	for _, part := range grants(history) {
		judge("tokens", tokenModel, part)
	}
	return wrong, undecided
}

// firstLeftOut returns the first operation that is not in the longest order found.
func firstLeftOut(operations []porcupine.Operation, info porcupine.LinearizationInfo) string {
	longest := map[int]bool{}
	for _, order := range info.PartialLinearizations()[0] {
		if len(order) > len(longest) {
			clear(longest)
			for _, index := range order {
				longest[index] = true
			}
		}
	}
	first := -1
	for index, it := range operations {
		if !longest[index] && (first < 0 || it.Return < operations[first].Return) {
			first = index
		}
	}
	if first < 0 {
		return "it"
	}
	return operations[first].Metadata.(*operation).line
}

// steps converts the operations of a lock to porcupine's type.
func steps(history []*operation) []porcupine.Operation {
	ends := map[string][]span{}
	var waits []*operation
	for _, it := range history {
		if it.What == "end" && it.Outcome.word == "unknown" {
			ends[it.Owner] = append(ends[it.Owner], span{it.From, it.latest()})
		}
		if it.What == "acquire" && (it.Wait || it.Several) {
			waits = append(waits, it)
		}
	}
	var all []porcupine.Operation
	add := func(it *operation, in input) {
		in.operation, in.ends = it, ends
		all = append(all, porcupine.Operation{Input: in, Call: it.From, Return: it.latest(), Metadata: it})
	}
	for _, it := range history {
		switch {
		case it.Outcome.word == "error", it.What == "end" && it.Outcome.word == "unknown":
		case it.What == "acquire":
			meets := func(other *operation) bool {
				return other != it && other.From <= it.latest() && it.From <= other.latest()
			}
			add(it, input{mayBeRefused: it.Several || slices.ContainsFunc(waits, meets)})
			if it.Outcome.word == "unconfirmed" {
				add(it, input{revokes: true})
			}
		default:
			add(it, input{})
		}
	}
	return all
}

// grants returns the grants of all locks of a server, in parts that are short enough for a search. Each later grant
// must have a greater token.
func grants(history []*operation) [][]porcupine.Operation {
	type grant struct {
		owner string
		token int64
	}
	type place struct{ key, owner string }
	spans := map[grant]*porcupine.Operation{}
	raised := map[grant]bool{}
	unanswered := map[place]int64{}
	for _, it := range history {
		if it.What != "acquire" && it.What != "renew" {
			continue
		}
		if it.Outcome.word == "unknown" || it.Outcome.word == "unconfirmed" {
			before, found := unanswered[place{it.Key, it.Owner}]
			if !found || it.From < before {
				unanswered[place{it.Key, it.Owner}] = it.From
			}
		}
		if it.Outcome.Token == nil {
			continue
		}
		of := grant{it.Owner, *it.Outcome.Token}
		raised[of] = raised[of] || it.Fence != nil
		if spans[of] == nil {
			spans[of] = &porcupine.Operation{Call: math.MaxInt64, Return: math.MaxInt64, Metadata: it}
		}
		spans[of].Call = min(spans[of].Call, it.From)
		// A re-entry returns the same token, and may get its reply sooner.
		spans[of].Return = min(spans[of].Return, it.latest())
	}
	var all []porcupine.Operation
	for of, it := range spans {
		if raised[of] {
			continue
		}
		// If a request had no reply, a later one may be the first to return its token.
		if from, found := unanswered[place{it.Metadata.(*operation).Key, of.owner}]; found {
			it.Call = min(it.Call, from)
		}
		it.Input = of.token
		all = append(all, *it)
	}
	slices.SortFunc(all, func(one, other porcupine.Operation) int {
		return cmp.Or(cmp.Compare(one.Call, other.Call), cmp.Compare(one.Input.(int64), other.Input.(int64)))
	})
	byTag := map[string][]porcupine.Operation{}
	for _, it := range all {
		tag := hashTag(it.Metadata.(*operation).Key)
		byTag[tag] = append(byTag[tag], it)
	}
	var parts [][]porcupine.Operation
	for _, of := range byTag {
		parts = append(parts, places(of)...)
	}
	return parts
}

// hashTag returns the hash tag of a key. Keys with one tag are at one node of a cluster, and each node has its own
// clock.
func hashTag(key string) string {
	if _, behind, found := strings.Cut(key, "{"); found {
		if tag, _, found := strings.Cut(behind, "}"); found {
			return tag
		}
	}
	return ""
}

// places splits the grants into parts, and replaces each token by its rank in its part.
func places(all []porcupine.Operation) [][]porcupine.Operation {
	var parts [][]porcupine.Operation
	for part := range slices.Chunk(all, 5_000) {
		tokens := make([]int64, len(part))
		for index, it := range part {
			tokens[index] = it.Input.(int64)
		}
		slices.Sort(tokens)
		for index := range part {
			part[index].Input, _ = slices.BinarySearch(tokens, part[index].Input.(int64))
		}
		parts = append(parts, part)
	}
	return parts
}

// tokenModel counts the grants so far: a grant is possible when the count equals the rank of its token. Two grants with
// one token have the same rank, so no order allows both.
var tokenModel = porcupine.Model{
	Init: func() any { return 0 },
	Step: func(before, place, _ any) (bool, any) { return before == place, before.(int) + 1 },
}
