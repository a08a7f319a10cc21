"""Lists and watches: reflectors, their recovery, and the feed into the store."""
