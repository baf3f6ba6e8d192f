"""Constrained decoding: what a request asks for becomes a `GrammarSpec`, and a spec becomes a mask for each token.

`request` reads the API's fields, `compile` checks a spec at the door and turns it into a grammar, `vocabulary` carries
a tokenizer's bytes to where masks are made, `grammar` holds the state of one sequence. The work is done by the
llguidance library; only `compile` and `grammar` import it.
"""
