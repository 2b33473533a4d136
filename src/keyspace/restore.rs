//! Writes a mutex as one command: `RESTORE`, with the value that `DUMP` would return.
//!
//! `HSET` and `PEXPIREAT` become four commands, since the server wraps two in `MULTI` and `EXEC`. Handing a command
//! over for replication costs the server more than running it. A single command is atomic by itself.

use super::known::known;
use crate::lock::{Hold, Token};
use crate::server::{Ctx, commands};
use crc::{CRC_64_REDIS, Crc, Table};

/// Asks the server whether it has the command, which may have been renamed.
pub fn exists(ctx: Ctx) -> bool {
    commands::exists(ctx, c"RESTORE")
}

/// The hash of a new lock with this holder, in the form that `RESTORE` takes; `None` if the module can't use that
/// command.
pub fn dump_of_mutex(owner: &[u8], hold: &Hold) -> Option<Vec<u8>> {
    let usable = known(|it| it.has_restore) && owner.len() <= LONGEST;
    usable.then(|| dump(owner, hold.holds, hold.token))
}

/// The type of a hash in a listpack in snapshots, and the first snapshot version that has it. That is the version of
/// Redis 7.0, which every server that can replicate from this one reads.
const HASH_LISTPACK: u8 = 16;
const VERSION: u16 = 10;

/// The longest string whose length fits into 12 bits.
const LONGEST: usize = 0xfff;

/// The whole dump: type, length and bytes of the listpack, version, checksum.
fn dump(owner: &[u8], holds: u64, fence: Option<Token>) -> Vec<u8> {
    const HEAD: usize = 3;
    let mut list = List(Vec::with_capacity(owner.len().saturating_add(64)));
    list.0.extend([HASH_LISTPACK, 0, 0, 0, 0, 0, 0, 0, 0]); // Lengths are filled in below.
    list.string(owner);
    list.number(holds);
    let mut elements = 2_u16;
    if let Some(fence) = fence {
        list.string(b"#fence");
        list.number(fence);
        elements = 4;
    }
    let List(mut bytes) = list;
    bytes.push(0xff);
    let len = u16::try_from(bytes.len().saturating_sub(HEAD)).unwrap_or(0);
    let [high, low] = len.to_be_bytes();
    let ([b0, b1, ..], [e0, e1]) = (u32::from(len).to_le_bytes(), elements.to_le_bytes());
    for (place, byte) in bytes.iter_mut().skip(1).zip([0x40 | high, low, b0, b1, 0, 0, e0, e1]) {
        *place = byte;
    }
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend(CRC.checksum(&bytes).to_le_bytes());
    bytes
}

/// A listpack under construction. The encoded length of each element follows it.
struct List(Vec<u8>);

impl List {
    fn string(&mut self, bytes: &[u8]) {
        let len = bytes.len().min(LONGEST);
        let [high, low] = u16::try_from(len).unwrap_or(0).to_be_bytes();
        let head: &[u8] = if len < 64 { &[0x80 | low] } else { &[0xe0 | high, low] };
        self.0.extend_from_slice(head);
        self.0.extend_from_slice(bytes);
        match head.len().saturating_add(len) {
            whole @ ..128 => self.0.push(u8::try_from(whole).unwrap_or(0)),
            whole => self.0.extend([u8::try_from(whole >> 7).unwrap_or(0), 0x80 | (whole & 0x7f) as u8]),
        }
    }

    fn number(&mut self, number: u64) {
        match number {
            0..128 => self.0.extend([number as u8, 1]),
            _ => {
                self.0.push(0xf4);
                self.0.extend(number.to_le_bytes());
                self.0.push(9);
            }
        }
    }
}

/// The checksum of dumps and snapshots.
static CRC: Crc<u64, Table<16>> = Crc::<u64, Table<16>>::new(&CRC_64_REDIS);

#[cfg(test)]
mod tests {
    use super::dump;

    /// The listpack is what Redis 7.0 returns for `HSET k me 1 #fence 1700000000000000`, `DUMP k`. The length before it
    /// has two encodings; here it is the longer one.
    #[test]
    fn dump_equals_that_of_a_server() {
        let of_server = b"\x1f\0\0\0\x04\0\x82me\x03\x01\x01\x86#fence\x07\xf4\x00@\x1e\x18$\n\x06\x00\t\xff\n\x00";
        let ours = dump(b"me", 1, Some(1_700_000_000_000_000));
        assert_eq!(ours[..3], [0x10, 0x40, 0x1f]);
        assert_eq!(ours[3..ours.len() - 8], of_server[..]);
    }

    /// The bytes that follow a string of this length in the `DUMP` of `HSET k xx… 1`, on Redis 7.0 with
    /// `hash-max-listpack-value 1000`: the length of the string and its head, in one byte or two.
    #[test]
    fn long_owner_is_followed_by_its_length() {
        for (bytes, length) in [(125, &b"\x7f"[..]), (126, b"\x01\x80"), (200, b"\x01\xca")] {
            let ours = dump(&vec![b'x'; bytes], 1, None);
            let behind = ours.iter().rposition(|byte| *byte == b'x').map(|last| &ours[last + 1..]);
            assert!(behind.is_some_and(|behind| behind.starts_with(length)), "{bytes}: {behind:?}");
        }
    }
}
