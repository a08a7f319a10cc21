package main

import (
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"os"
	"strconv"
)

// token signs a JWT (ES256), like a kube-apiserver with this signing key. The arguments are the
// key's file, the issuer, the subject and the Unix time of the expiry.
func token(arguments []string) (string, error) {
	if len(arguments) != 4 {
		return "", errors.New("usage: certificates token KEY ISSUER SUBJECT EXPIRES")
	}
	expires, err := strconv.ParseInt(arguments[3], 10, 64)
	if err != nil {
		return "", err
	}
	text, err := os.ReadFile(arguments[0])
	if err != nil {
		return "", err
	}
	block, _ := pem.Decode(text)
	if block == nil {
		return "", errors.New(arguments[0] + ": expected a PEM file")
	}
	parsed, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return "", err
	}
	key, ok := parsed.(*ecdsa.PrivateKey)
	if !ok {
		return "", errors.New(arguments[0] + ": expected an ECDSA key")
	}
	claims := map[string]any{
		"iss": arguments[1], "sub": arguments[2], "aud": []string{arguments[1]},
		"exp": expires, "iat": expires - 3600, "nbf": expires - 3600,
	}
	head, err := part(map[string]any{"alg": "ES256", "typ": "JWT"})
	if err != nil {
		return "", err
	}
	body, err := part(claims)
	if err != nil {
		return "", err
	}
	digest := sha256.Sum256([]byte(head + "." + body))
	r, s, err := ecdsa.Sign(rand.Reader, key, digest[:])
	if err != nil {
		return "", err
	}
	signature := append(r.FillBytes(make([]byte, 32)), s.FillBytes(make([]byte, 32))...)
	return head + "." + body + "." + base64.RawURLEncoding.EncodeToString(signature), nil
}

func part(value map[string]any) (string, error) {
	text, err := json.Marshal(value)
	return base64.RawURLEncoding.EncodeToString(text), err
}
