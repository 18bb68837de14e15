"""The paged KV cache: the pool of pages on the device, the page table, and the allocator on the host."""
