"""Paged KV cache: the page pool and the page table on the device, and the allocators on the host."""
