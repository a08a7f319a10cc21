package verdicts

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"
)

const (
	mostBlocked = 100_000

	// The upper limit of an answer's maxAgeSeconds.
	longestMaxAge = time.Hour
)

var errTooLarge = errors.New("the answer is too large")

// candidate is a launcher pod's VMI.
type candidate struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	VMIUID    string `json:"vmiUid,omitempty"`
	Node      string `json:"node,omitempty"`
	Pod       string `json:"pod,omitempty"`
}

func (c candidate) key() vmiKey {
	return vmiKey{namespace: c.Namespace, name: c.Name}
}

type verdictsRequest struct {
	Checkpoint string      `json:"checkpoint,omitempty"` // empty: all rules apply
	Candidates []candidate `json:"candidates"`
}

// Pointers distinguish a missing field from false.
type verdictsAnswer struct {
	Stale    *bool `json:"stale"`
	Verdicts []struct {
		Namespace string `json:"namespace"`
		Name      string `json:"name"`
		Known     *bool  `json:"known"`
		Allowed   *bool  `json:"allowed"`
		Reason    string `json:"reason"`
		NotBefore string `json:"notBefore"`
	} `json:"verdicts"`
}

type blockedAnswer struct {
	Stale         *bool   `json:"stale"`
	MaxAgeSeconds float64 `json:"maxAgeSeconds"`
	Blocked       []struct {
		Namespace  string `json:"namespace"`
		Name       string `json:"name"`
		VMIUID     string `json:"vmiUid"`
		Checkpoint string `json:"checkpoint"`
		Reason     string `json:"reason"`
		NotBefore  string `json:"notBefore"`
	} `json:"blocked"`
}

// readVerdict reads the answer to a request about one candidate.
func readVerdict(body []byte, asked candidate) (outcome, block, error) {
	var answer verdictsAnswer
	if err := json.Unmarshal(body, &answer); err != nil {
		return 0, block{}, fmt.Errorf("the answer is not a list of verdicts: %w", err)
	}
	if answer.Stale == nil {
		return 0, block{}, errors.New("stale: missing from the answer")
	}
	if len(answer.Verdicts) != 1 {
		return 0, block{}, fmt.Errorf("verdicts: expected 1, not %d", len(answer.Verdicts))
	}
	verdict := answer.Verdicts[0]
	if verdict.Namespace != asked.Namespace || verdict.Name != asked.Name {
		return 0, block{}, fmt.Errorf("verdicts[0]: expected %s/%s, not %s/%s",
			asked.Namespace, asked.Name, verdict.Namespace, verdict.Name)
	}
	switch {
	case verdict.Allowed == nil || verdict.Known == nil:
		return 0, block{}, errors.New("verdicts[0]: expected both allowed and known")
	case !*verdict.Allowed:
		return blocked, block{reason: verdict.Reason, notBefore: verdict.NotBefore}, nil
	case *answer.Stale:
		return stale, block{}, nil
	case !*verdict.Known:
		return unknown, block{}, nil
	default:
		return allowed, block{}, nil
	}
}

// readSnapshot reads the set of blocked VMIs, and stores the ETag and the time of the answer with it.
func readSnapshot(body []byte, etag string, answeredAt time.Time) (*snapshot, error) {
	var answer blockedAnswer
	if err := json.Unmarshal(body, &answer); err != nil {
		return nil, fmt.Errorf("the answer is not a blocked set: %w", err)
	}
	switch {
	case etag == "":
		return nil, errors.New("ETag: missing from the answer")
	case answer.Stale == nil:
		return nil, errors.New("stale: missing from the answer")
	case answer.MaxAgeSeconds <= 0:
		return nil, fmt.Errorf("maxAgeSeconds: expected more than 0, not %g", answer.MaxAgeSeconds)
	case answer.Blocked == nil:
		return nil, errors.New("blocked: missing from the answer")
	case len(answer.Blocked) > mostBlocked:
		return nil, fmt.Errorf("%w: %d blocked VMIs, expected at most %d",
			errTooLarge, len(answer.Blocked), mostBlocked)
	}
	read := &snapshot{
		etag:       etag,
		stale:      *answer.Stale,
		maxAge:     time.Duration(min(answer.MaxAgeSeconds, longestMaxAge.Seconds()) * float64(time.Second)),
		answeredAt: answeredAt,
	}
	for at := range read.blocks {
		read.blocks[at] = map[vmiKey]block{}
	}
	for _, entry := range answer.Blocked {
		for at, name := range checkpoints {
			if entry.Checkpoint == name {
				key := vmiKey{namespace: entry.Namespace, name: entry.Name}
				read.blocks[at][key] = block{vmiUID: entry.VMIUID, reason: entry.Reason, notBefore: entry.NotBefore}
			}
		}
	}
	return read, nil
}
