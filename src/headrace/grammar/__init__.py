"""Grammars that constrain outputs, on the llguidance library or, if asked for, on xgrammar.

`Grammars` compiles (off the hot path, cached); a `GrammarState` follows one sequence; `fill_masks`
says which tokens may come next, at every drafted position.
"""

from headrace.grammar.compiler import CompiledGrammar, Grammars
from headrace.grammar.state import Grammar, GrammarState, fill_masks, num_mask_words

__all__ = ["CompiledGrammar", "Grammar", "GrammarState", "Grammars", "fill_masks", "num_mask_words"]
