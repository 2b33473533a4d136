package main

import (
	"path/filepath"
	"testing"
	"time"
)

func each(t *testing.T, folder string, least int, see func(t *testing.T, wrong []string)) {
	files, err := filepath.Glob(filepath.Join("..", folder, "*.jsonl"))
	if err != nil || len(files) < least {
		t.Fatalf("%s has %d histories: %v", folder, len(files), err)
	}
	for _, name := range files {
		t.Run(filepath.Base(name), func(t *testing.T) {
			history, err := readFile(name)
			if err != nil {
				t.Fatal(err)
			}
			wrong, undecided := check(history, time.Hour)
			if len(undecided) > 0 {
				t.Fatalf("not decided: %v", undecided)
			}
			see(t, wrong)
		})
	}
}

func TestCheckerRefusesHistoriesThatAreWrong(t *testing.T) {
	each(t, "wrong", 12, func(t *testing.T, wrong []string) {
		if len(wrong) == 0 {
			t.Fatal("accepted")
		}
		t.Log(wrong)
	})
}

func TestCheckerAcceptsHistoriesThatAreRight(t *testing.T) {
	each(t, "right", 4, func(t *testing.T, wrong []string) {
		if len(wrong) > 0 {
			t.Fatal(wrong)
		}
	})
}
