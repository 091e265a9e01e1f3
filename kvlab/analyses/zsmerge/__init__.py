"""ZSMerge: does merging what is evicted keep the attention output closer?"""
