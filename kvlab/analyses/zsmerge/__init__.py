"""ZSMerge: does merging keep the attention output closer than eviction?"""
