"""What the compiled core does, in plain Python that can be read; property tests compare them."""
