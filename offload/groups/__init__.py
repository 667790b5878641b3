"""What each kind of attention needs of the KV cache: one file per kind over one base.

- `base`: block tables of one group, the part that all kinds share
- `full`: full attention, MLA, sinks
- `sliding_window`: sliding window
- `chunked_local`: chunked local attention
- `mamba`: Mamba and linear attention
- `cross_attention`: cross attention
"""
