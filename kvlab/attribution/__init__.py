"""The effect of each evicted entry's loss on the response, in nats, and of the entries put back."""
