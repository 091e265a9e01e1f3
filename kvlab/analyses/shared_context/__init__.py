"""Several questions over one compressed context: what a policy that has read the question knows of the next one."""
