"""Which evicted entries cost a response: how few they are, where they lie, and which policies keep them."""
