"""What a change does to the hidden state, the logits and the probabilities.

- `divergence`: one layer skipped; `spaces`: the measures; `hierarchy`: h → z → p at each decoding step;
- `generation`, `attention_paths`: two models writing on their own; `choices`: the same items answered by both.
"""
