/* CRC32C of the pages of a file that this context has written, to be compared when they are read. */
#ifndef TIERING_AIO_VERIFY_H
#define TIERING_AIO_VERIFY_H

#include <stdint.h>

/* A tree of three levels. Nodes are allocated on first use, so that memory does not depend on the offsets. */
enum { CHECKSUM_FAN = 4096 }; /* children per node: 2^36 pages, 2^48 bytes of a file */

struct checksum_row {
    uint32_t *sums[CHECKSUM_FAN]; /* indexed by page / FAN % FAN, then by page % FAN */
};

struct checksums {              /* all zero: no checksums are stored */
    struct checksum_row **rows; /* indexed by page / FAN^2 */
};

/* Store the checksums of data that is about to be written at `offset` of the file. The checksum of a page that is
 * written in part is deleted. Returns 0, -ENOMEM, or -EFBIG past 2^48 bytes. */
int aio_checksums_note(struct checksums *known, const char *data, uint64_t offset, uint64_t nbytes);

/* Compare data that was read with the stored checksums; pages that were read in part are skipped. Returns 0, or
 * -EBADMSG with *bad, the offset of the first page that differs. */
int aio_checksums_check(const struct checksums *known, const char *data, uint64_t offset, uint64_t nbytes,
                        uint64_t *bad);

void aio_checksums_free(struct checksums *known);

#endif
