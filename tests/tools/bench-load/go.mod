module tools/bench-load

go 1.26.0
