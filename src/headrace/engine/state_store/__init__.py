"""State that outlives a process: pieces of cached prefixes in host memory and in files.

wire.py      a piece as bytes, and what is wrong with bytes that are none
folder.py    files that several processes share, bounded
store.py     both tiers, and the threads that land, write and read
prefixes.py  the scheduler's side: what to save, what to load, into which blocks
context.py   what determines a piece's bytes beside its tokens
"""
