"""The linear losses: loss and gradients from hidden states and a head, without the (tokens, vocabulary) logits."""
