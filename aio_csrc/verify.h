/* CRC32C of the pages of a file that this context has written, to be compared when they are read. */
#ifndef TIERING_AIO_VERIFY_H
#define TIERING_AIO_VERIFY_H

#include <stddef.h>
#include <stdint.h>

/* A tree of three levels. Nodes are allocated on first use, so that memory does not depend on the offsets. */
enum { CHECKSUM_FAN = 4096 }; /* children per node: 2^36 pages, 2^48 bytes of a file */

struct checksum_row {
    uint32_t *sums[CHECKSUM_FAN]; /* indexed by page / FAN % FAN, then by page % FAN */
};

struct checksums {              /* all zero: no checksums are stored */
    struct checksum_row **rows; /* indexed by page / FAN^2 */
};

/* The pages that a range of a file covers in full. Other pages have no part in a transfer's checksums. */
struct page_range {
    uint64_t first, end;
};

struct page_range aio_whole_pages(uint64_t offset, uint64_t nbytes);

/* Store the checksums of the whole pages of a range that is about to be written. The checksum of a page that is
 * written in part is deleted. Returns 0, -ENOMEM, or -EFBIG past 2^48 bytes. */
int aio_checksums_store(struct checksums *known, uint64_t offset, uint64_t nbytes, const uint32_t *sums);

/* Compare the checksums of the whole pages of a range that was read with the stored ones. Returns 0, or -EBADMSG
 * with *bad, the offset of the first page that differs. */
int aio_checksums_compare(const struct checksums *known, uint64_t offset, uint64_t nbytes,
                          const uint32_t *sums, uint64_t *bad);

/* Copy the checksums of n pages from page `first` on to or from `sums`; 0: the page has none. Set returns 0, -ENOMEM or
 * -EFBIG. */
void aio_checksums_get(const struct checksums *known, uint64_t first, size_t n, uint32_t *sums);
int aio_checksums_set(struct checksums *known, uint64_t first, size_t n, const uint32_t *sums);

void aio_checksums_free(struct checksums *known);

#endif
