"""The fake model: the next token is a hash of the weights and of every token before it.

STEP_US is what a step costs on the tests' clock; nothing ever sleeps for it.
"""

import hashlib

STEP_US = 1000
HOST_READS = 4


def next_token(weights, ids, vocabulary):
    """Deterministic, different for other weights, never one of the two lowest ids."""
    digest = hashlib.sha256(weights + repr(ids).encode()).digest()
    return 2 + int.from_bytes(digest[:4], "big") % (vocabulary - 2)


def generate(weights, prompt, count, vocabulary):
    """Yield `count` greedy tokens."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(weights, ids, vocabulary))
        yield ids[-1]
