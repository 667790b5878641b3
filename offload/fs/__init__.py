"""The disk tier: what it holds and evicts (`manager`), its files (`store`, `block_file`), the
copies to and from the GPU."""
