"""MorphKV: a constant-sized cache, led by the recent tokens' attention."""
