/* CRC32C of the pages of a file that were written here, to be compared when they are read. */
#ifndef TIERING_AIO_VERIFY_H
#define TIERING_AIO_VERIFY_H

#include <stdint.h>

enum { CHECKSUMS_PER_CHUNK = 4096 };

struct checksums {     /* zeros: nothing is known */
    uint32_t **chunks; /* by page / CHECKSUMS_PER_CHUNK; NULL: nothing known there */
    uint64_t n_chunks;
};

/* Remember what is about to be written; data begins at an offset of the file. A page that is written in part
 * is forgotten. 0 or -ENOMEM. */
int aio_checksums_note(struct checksums *known, const char *data, uint64_t offset, uint64_t nbytes);

/* Compare what was read with what is remembered; pages read in part are not looked at. Returns 0, or -EBADMSG
 * with *bad, the offset of the first page that differs. */
int aio_checksums_check(const struct checksums *known, const char *data, uint64_t offset, uint64_t nbytes,
                        uint64_t *bad);

void aio_checksums_free(struct checksums *known);

#endif
