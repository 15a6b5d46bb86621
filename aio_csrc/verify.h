/* CRC32C of the pages of a file that were written here, to be compared when they are read. */
#ifndef TIERING_AIO_VERIFY_H
#define TIERING_AIO_VERIFY_H

#include <stdint.h>

/* A tree of three levels, made where it is needed: a far offset costs no more than a near one. */
enum { CHECKSUM_FAN = 4096 }; /* at each level: 2^36 pages, 2^48 bytes of a file */

struct checksum_row {
    uint32_t *sums[CHECKSUM_FAN]; /* by page / FAN % FAN, then by page % FAN */
};

struct checksums {              /* zeros: nothing is known */
    struct checksum_row **rows; /* by page / FAN^2 */
};

/* Remember what is about to be written; data begins at an offset of the file. A page that is written in part
 * is forgotten. 0, -ENOMEM, or -EFBIG behind 2^48 bytes. */
int aio_checksums_note(struct checksums *known, const char *data, uint64_t offset, uint64_t nbytes);

/* Compare what was read with what is remembered; pages read in part are not looked at. Returns 0, or -EBADMSG
 * with *bad, the offset of the first page that differs. */
int aio_checksums_check(const struct checksums *known, const char *data, uint64_t offset, uint64_t nbytes,
                        uint64_t *bad);

void aio_checksums_free(struct checksums *known);

#endif
