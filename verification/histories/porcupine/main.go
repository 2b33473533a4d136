// Command porcupine checks histories for linearizability with github.com/anishathalye/porcupine. It reads the same
// files as the crate `histories` and shares no code with it, so it is an independent checker.
package main

import (
	"flag"
	"fmt"
	"os"
	"time"
)

func main() {
	seconds := flag.Float64("seconds", 60, "how long a lock may take")
	flag.Parse()
	status := 0
	for _, name := range flag.Args() {
		history, err := readFile(name)
		if err != nil {
			fmt.Fprintln(os.Stderr, "porcupine:", name+":", err)
			os.Exit(2)
		}
		begin := time.Now()
		wrong, undecided := check(history, time.Duration(*seconds*float64(time.Second)))
		says := "explained"
		switch {
		case len(wrong) > 0:
			says, status = "WRONG", 1
		case len(undecided) > 0:
			says, status = "not decided", 1
		}
		fmt.Printf("%s: %s: %d operations in %.1f s\n", name, says, len(history), time.Since(begin).Seconds())
		for _, it := range wrong {
			fmt.Println("   ", it)
		}
		for _, it := range undecided {
			fmt.Println("    not decided in time:", it)
		}
	}
	os.Exit(status)
}
