"""One sentence for each word of the trade, said where it first appears on the page."""

from __future__ import annotations

import re

WORDS = {
    "dense": "the model that nothing was taken from.",
    "perplexity": "how surprised a model is by a text; 1 is never, and lower is better.",
    "layer": "one of the blocks that a transformer passes every token through, counted here from 0.",
    "window": "a stretch of the text that the model reads at once.",
    "cut": "the layers were removed and nothing else was changed.",
    "mended": "the layer before a gap took a linear map that stands in for the removed ones, without training.",
    "healed": "the pruned model was trained for some steps to predict what the dense one predicts.",
    "removal check": "whether the written checkpoint computes what the model without those layers must compute.",
    "ρ": "(rho) the factor by which a layer changes an error relative to the state; below 1 the error shrinks.",
    "Block Influence": "how far a layer turns the hidden state, 1 − cosine; near 0 it does little.",
    "hidden state": "the vector that the model keeps for a token between two layers.",
    "pooling": "how tokens are put together: by energy large tokens count most, by token all count alike.",
    "interval": "where a number would lie in 95 of 100 repetitions on windows like these.",
    "KL": "Kullback–Leibler divergence, in nats: how far the next token's probabilities moved; 0 is not at all.",
    "logits": "the scores that become the probabilities of the next token.",
    "criterion": "a rule that scores layers; the lowest score is removed first.",
    "calibration": "the half of a text that may be used to measure and fit; the other half is for evaluation.",
    "prefill": "reading the prompt; decoding is writing token after token.",
    "bound": "a limit that a theorem sets to an error.",
    "regret": "by how much a change raises the perplexity.",
}


class Glossary:
    """Hands out each sentence once, to the first text that holds its word."""

    def __init__(self) -> None:
        self._left = dict(WORDS)

    def first_in(self, text: str) -> list[tuple[str, str]]:
        """(word, sentence) of the words that `text` is the first to hold."""
        found = [
            word for word in self._left if re.search(rf"(?<!\w){re.escape(word)}(?:s|es)?(?!\w)", text, re.IGNORECASE)
        ]
        return [(word, self._left.pop(word)) for word in found]
