package verdicts

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"time"
)

const (
	mostVerdictBytes = 64 << 10
	mostBlockedBytes = 16 << 20
	mostProblemBytes = 4 << 10
	mostHeaderBytes  = 64 << 10

	// An answer to the long poll may take this much longer than the requested wait.
	pollGrace = 10 * time.Second
)

// client calls the exporter's query API.
type client struct {
	base    string
	timeout time.Duration
	http    *http.Client
}

// statusError is an answer with an unexpected HTTP status.
type statusError struct {
	status int
	detail string
}

func (e *statusError) Error() string {
	if e.detail == "" {
		return fmt.Sprintf("answered %d %s", e.status, http.StatusText(e.status))
	}
	return fmt.Sprintf("answered %d: %s", e.status, e.detail)
}

// isRejection reports whether the exporter works but rejected the request as invalid. Such an
// answer must not open the breaker. Otherwise anybody who can label a pod could keep the breaker
// open.
func isRejection(err error) bool {
	var answered *statusError
	if !errors.As(err, &answered) {
		return false
	}
	switch answered.status {
	case http.StatusBadRequest, http.StatusRequestEntityTooLarge, http.StatusUnprocessableEntity:
		return true
	}
	return false
}

// newClient returns a client that has not connected yet.
func newClient(at endpoint, args *Args) *client {
	return &client{
		base:    at.base,
		timeout: args.HTTPTimeout.Duration,
		http: &http.Client{
			Transport: newTransport(at, args),
			// Redirects are not followed, so that the token never reaches another server.
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
	}
}

// ask requests a verdict. The exporter counts the verdict if it blocks. A request at preEviction
// names no checkpoint, so that the rules of both apply: a migration may have begun since Filter
// read the snapshot.
func (c *client) ask(ctx context.Context, at checkpoint, asked candidate) (outcome, block, error) {
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	content := verdictsRequest{Candidates: []candidate{asked}}
	if at == atFilter {
		content.Checkpoint = checkpoints[at]
	}
	body, err := json.Marshal(content)
	if err != nil {
		return 0, block{}, err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, c.base+"/v1/verdicts", bytes.NewReader(body))
	if err != nil {
		return 0, block{}, err
	}
	request.Header.Set("Content-Type", "application/json")
	// This header allows net/http to send the request again, for example when the exporter has just
	// closed an idle connection. The header itself is not sent, because it has no value.
	request.Header["Idempotency-Key"] = nil
	response, err := c.http.Do(request)
	if err != nil {
		return 0, block{}, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return 0, block{}, readProblem(response)
	}
	answer, err := readAtMost(response.Body, mostVerdictBytes)
	if err != nil {
		return 0, block{}, err
	}
	return readVerdict(answer, asked)
}

// poll requests the set of blocked VMIs. If there is a last snapshot, the exporter answers when the
// set changes, or after wait. If the set has not changed, poll returns the last snapshot with a new
// time.
func (c *client) poll(ctx context.Context, last *snapshot, wait time.Duration) (*snapshot, error) {
	ctx, cancel := context.WithTimeout(ctx, wait+pollGrace)
	defer cancel()
	target := c.base + "/v1/blocked"
	if wait > 0 {
		target += "?" + url.Values{"wait": {strconv.FormatFloat(wait.Seconds(), 'f', 3, 64)}}.Encode()
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, target, nil)
	if err != nil {
		return nil, err
	}
	if last != nil {
		request.Header.Set("If-None-Match", last.etag)
	}
	response, err := c.http.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	// The set was current when the answer began, even if reading the body takes long.
	answeredAt := time.Now()
	if response.StatusCode == http.StatusNotModified && last != nil {
		return last.renewed(answeredAt), nil
	}
	if response.StatusCode != http.StatusOK {
		return nil, readProblem(response)
	}
	answer, err := readAtMost(response.Body, mostBlockedBytes)
	if err != nil {
		return nil, err
	}
	return readSnapshot(answer, response.Header.Get("ETag"), answeredAt)
}

// close closes the idle connections.
func (c *client) close() {
	c.http.CloseIdleConnections()
}

func readAtMost(body io.Reader, most int64) ([]byte, error) {
	read, err := io.ReadAll(io.LimitReader(body, most+1))
	if err != nil {
		return nil, fmt.Errorf("the answer ended early: %w", err)
	}
	if int64(len(read)) > most {
		return nil, fmt.Errorf("%w: more than %d bytes", errTooLarge, most)
	}
	return read, nil
}

// readProblem returns the status and, from an application/problem+json body, its detail.
func readProblem(response *http.Response) error {
	var problem struct {
		Detail string `json:"detail"`
	}
	// If the body cannot be read, the status is enough.
	_ = json.NewDecoder(io.LimitReader(response.Body, mostProblemBytes)).Decode(&problem)
	return &statusError{status: response.StatusCode, detail: problem.Detail}
}
