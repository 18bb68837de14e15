"""Paged KV cache: the page pool and the page table on the device, and the page allocator on the host."""
