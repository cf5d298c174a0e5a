"""Several engines behind one address, through Ray Serve (`pip install 'headrace[ray]'`).

    client ── Ray's proxy ── router (`ingress.py`) ── replica (`replica.py`)
                             reads the prompt,        the application of `headrace serve`,
                             picks a replica          in a process of its own

A replica publishes which prefixes it holds, the router sends a request where most of its prompt is
(`routing.py`), and asks another replica where one was lost before it had said anything. Only
`ray_app.py` imports Ray.
"""
