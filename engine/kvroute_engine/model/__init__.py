"""The transformer and its pages, in torch.

The files; each imports only what is listed above it:

    kv_pages.py       pages seen as keys and values, as states, as bytes
    model.py          the transformer
    torch_runner.py   computes batches with it
    torch_backend.py  loaded by `kvroute_engine.core.build` for a model
"""
