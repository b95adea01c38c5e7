"""The divergence of a student's and a teacher's distribution over the vocabulary, from hidden states and heads."""
