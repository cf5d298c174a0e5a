"""Builds the shipped models: data, tokenizers, training, scores, release gate."""
