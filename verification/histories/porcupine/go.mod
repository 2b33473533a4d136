module holdfast/porcupine

go 1.24

// Searches for an order that explains a history, independently of stateright.
require github.com/anishathalye/porcupine v1.3.1
