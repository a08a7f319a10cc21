module tools/certificates

go 1.26.0
