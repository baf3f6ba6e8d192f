"""The HTTP side: bytes to request types to engine calls to bytes, and nothing else.

No scheduling, no arrays and no template logic. `app.build_app` makes the ASGI application over a started engine;
`serving.serve` runs it in a process, from the bound socket to the drained end.
"""
