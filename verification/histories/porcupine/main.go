// Command porcupine checks histories for linearizability by github.com/anishathalye/porcupine, as a second opinion beside the crate
// `histories`: it shares no code with that, and reads the same files.
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
