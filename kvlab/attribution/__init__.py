"""What the loss of each evicted entry did to the response: effects, in nats, and the entries put back."""
