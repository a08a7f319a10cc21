"""The benchmark's rows beside the informer in Go."""
