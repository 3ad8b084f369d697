//! The crate `fastcdc` as a peer of `nearkin bench kernels`.
//!
//!     fastcdc-crate FILE MIN AVERAGE MAX
//!
//! Reads FILE, then cuts it once for every line on stdin and answers with the nanoseconds of processor time that this
//! took and the number of chunks.

use fastcdc::v2020::FastCDC;
use std::io::{self, BufRead, Write};

#[repr(C)]
struct Timespec {
    seconds: i64,
    nanoseconds: i64,
}

extern "C" {
    fn clock_gettime(clock: i32, at: *mut Timespec) -> i32;
}

const PROCESS_CPU_TIME: i32 = 2; // CLOCK_PROCESS_CPUTIME_ID on Linux

fn cpu_nanoseconds() -> i64 {
    let mut at = Timespec { seconds: 0, nanoseconds: 0 };
    // The struct is that of 64-bit Linux, and lives until the call has ended.
    let failed = unsafe { clock_gettime(PROCESS_CPU_TIME, &mut at) };
    assert_eq!(failed, 0, "clock_gettime");
    at.seconds * 1_000_000_000 + at.nanoseconds
}

fn main() -> io::Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    let number = |place: usize| arguments[place].parse::<u32>().expect("MIN, AVERAGE, MAX: bytes");
    let (min, average, max) = (number(2), number(3), number(4));
    let data = std::fs::read(&arguments[1])?;
    for line in io::stdin().lock().lines() {
        line?;
        let started = cpu_nanoseconds();
        let (mut chunks, mut hashes) = (0u64, 0u64);
        for chunk in FastCDC::new(&data, min, average, max) {
            chunks += 1;
            hashes ^= chunk.hash; // so that nothing is left out as unused
        }
        let taken = cpu_nanoseconds() - started;
        println!("{taken} {chunks} {hashes}");
        io::stdout().flush()?;
    }
    Ok(())
}
