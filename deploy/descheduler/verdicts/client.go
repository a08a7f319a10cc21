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

	// How long an answer to the long poll may take beyond the wait that it asked for.
	pollGrace = 10 * time.Second
)

// client speaks the exporter's query API.
type client struct {
	base    string
	timeout time.Duration
	http    *http.Client
}

// statusError is an answer that is not the one asked for.
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

// isRefusal tells whether the exporter works and only will not take what was asked. Such an answer
// must not open the breaker: anybody who can label a pod could keep it open.
func isRefusal(err error) bool {
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

// newClient makes no connection yet.
func newClient(at endpoint, args *Args) *client {
	return &client{
		base:    at.base,
		timeout: args.HTTPTimeout.Duration,
		http: &http.Client{
			Transport: newTransport(at, args),
			// A token goes to nobody else.
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
	}
}

// ask asks for a verdict, which the exporter counts where it blocks. Before an eviction it asks by
// all rules: a migration may have begun since the snapshot that Filter used.
func (c *client) ask(ctx context.Context, at checkpoint, asked candidate) (outcome, block, error) {
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	question := verdictsRequest{Candidates: []candidate{asked}}
	if at == atFilter {
		question.Checkpoint = checkpoints[at]
	}
	body, err := json.Marshal(question)
	if err != nil {
		return 0, block{}, err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, c.base+"/v1/verdicts", bytes.NewReader(body))
	if err != nil {
		return 0, block{}, err
	}
	request.Header.Set("Content-Type", "application/json")
	// Not sent, being empty: it tells net/http that asking twice does no harm, so that a kept
	// connection which the exporter has just closed is no failure.
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

// poll asks what is blocked. With a snapshot it waits until that has changed, or for so long, and
// answers the same one renewed where it has not.
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
	// The set was true when the answer began, however long its body takes.
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

// close ends the connections that no request uses.
func (c *client) close() {
	c.http.CloseIdleConnections()
}

func readAtMost(body io.Reader, most int64) ([]byte, error) {
	read, err := io.ReadAll(io.LimitReader(body, most+1))
	if err != nil {
		return nil, fmt.Errorf("the answer broke off: %w", err)
	}
	if int64(len(read)) > most {
		return nil, fmt.Errorf("%w: more than %d bytes", errTooLarge, most)
	}
	return read, nil
}

// readProblem reads the detail of an application/problem+json, if that is what it is.
func readProblem(response *http.Response) error {
	var problem struct {
		Detail string `json:"detail"`
	}
	// What cannot be read leaves the status, which says enough.
	_ = json.NewDecoder(io.LimitReader(response.Body, mostProblemBytes)).Decode(&problem)
	return &statusError{status: response.StatusCode, detail: problem.Detail}
}
