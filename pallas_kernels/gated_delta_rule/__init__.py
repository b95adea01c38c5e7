"""The gated delta rule: a linear attention whose state forgets and overwrites, in chunks of tokens."""
